"""Adapters: environments of other libraries, unmodified, as environments of ours."""
