"""What the benchmarks share: a command line, resumable results, tables, data, training, measures and timing.

Scripts of benchmarks/ find this folder by themselves; those of benchmarks/paper/ add benchmarks/ to the path first.
"""
