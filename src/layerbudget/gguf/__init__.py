"""GGUF files as models: their architectures, names, tensors, tokenizers, and the folder that is made of one."""
