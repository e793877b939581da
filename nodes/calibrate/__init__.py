"""What this machine's cores and devices do in a second: what `penstock doctor --measure` asks a child to find out."""
