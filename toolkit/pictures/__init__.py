"""Pictures of requests: from a URL to the pixels that a vision tower reads.

The server's own process only moves bytes (`sources`, `fetch`). It never decodes a picture: that is
done by two workers (`worker`), forked from a zygote that has imported Pillow and Transformers'
image processor (`zygote`). A `PicturePool` takes a worker for each picture, and limits its time. A
`keeper` starts the zygote: one for all API workers of a server."""
