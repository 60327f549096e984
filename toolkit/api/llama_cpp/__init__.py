"""llama.cpp's routes, answered by the code of completions, chats and embeddings."""
