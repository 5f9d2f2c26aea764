"""What tests of several folders share: helpers, and the plugins of this test suite."""
