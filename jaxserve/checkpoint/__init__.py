"""Finds models and reads them: safetensors folders, GGUF files, hub downloads, cached weights.

Every format appears with the tensor names and shapes of Hugging Face. The package knows nothing of
engines or requests. Only `orbax_cache` uses JAX; all else also runs in the front process.
"""
