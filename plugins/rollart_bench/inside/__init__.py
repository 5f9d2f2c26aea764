"""The files that `rollart bench isolation` puts into a sandbox."""
