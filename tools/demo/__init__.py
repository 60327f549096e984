"""The demo model's corpus and training.

`facts` reads `facts.txt` and `talk.txt`. `corpus` turns them into conversations, with wording from
`frames` and `words` and generated content from `invent` and `elsewhere`. `train` trains the model,
and `evaluate` asks it held-out questions."""
