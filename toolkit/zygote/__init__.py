"""Processes that decode what comes from outside, with limits of memory and time.

Two workers (`worker`) are forked from a zygote that has imported what they need (`process`). A
`WorkerPool` takes a worker for each task, and limits its time (`pool`, `lender`). A `keeper` starts
the zygote: one for all API workers of a server."""
