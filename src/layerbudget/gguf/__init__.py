"""Files of llama.cpp: architectures, names of tensors, vocabulary, importance matrix, writer and check."""
