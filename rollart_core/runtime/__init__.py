"""Where the parts of a run execute: on this machine, on a cluster, or under a virtual clock."""
