"""Files for llama.cpp: importance matrix, mixes of types, vocabulary, writer, and the check of what was written."""
