"""Runnable experiments as YAML files."""
