"""`tk doctor` and `tk collect-env`: check the machine and the installation."""
