"""Whether this machine and this installation can serve: `tk doctor` and `tk collect-env`."""
