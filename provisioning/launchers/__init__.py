"""Starting one peer that spans several nodes, by whatever starts processes there."""
