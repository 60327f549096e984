"""Pictures of requests: from a URL to the pixels that a vision tower reads.

The server's own process only moves bytes (`sources`, `fetch`). It never decodes a picture: that is
done by workers (`worker`), forked from a zygote that has imported Pillow and Transformers' image
processor (`zygote`). A `PicturePool` starts, limits and replaces them."""
