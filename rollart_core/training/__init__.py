"""Rules of training that need no torch: each is fed plain numbers and answers with plain records.

Takes: metrics, settings. Gives: decisions. Never: imports torch, does I/O or reads a clock.
"""
