"""Finds models and reads them: safetensors folders, GGUF files, hub downloads, cached weights.

Presents every format in the names and shapes of Hugging Face. Knows nothing of engines or requests.
Only `orbax_cache` uses JAX; all else also runs in the front process.
"""
