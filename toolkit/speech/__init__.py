"""Speech: sound files to clips, the tokens of transcriptions, and answers in several formats."""
