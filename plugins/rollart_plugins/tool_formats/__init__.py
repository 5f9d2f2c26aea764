"""Tool formats of model families, one module for each style of syntax."""
