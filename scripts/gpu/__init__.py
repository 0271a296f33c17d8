"""The parts of the GPU check, and the code that GPU scripts share: models, timing, workloads."""
