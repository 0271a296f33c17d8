"""What the GPU scripts share: models without weights files, timing, and the parts of the check."""
