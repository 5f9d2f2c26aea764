"""What `rollart bench isolation` puts in a box."""
