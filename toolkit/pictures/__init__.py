"""Pictures of requests: from a URL to the pixels that a vision tower reads.

The server's own process only moves bytes (`sources`, `fetch`). It never decodes a picture: that is
done by workers of a zygote (`toolkit.zygote`) that has imported Pillow and Transformers' image
processor (`work`), as a `PicturePool` asks them."""
