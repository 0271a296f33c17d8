"""Reading models from disk: safetensors folders, GGUF files, hub downloads."""
