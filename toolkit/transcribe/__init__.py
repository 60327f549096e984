"""`tk transcribe`: sound files to text and subtitles, by a server that runs or a private one."""
