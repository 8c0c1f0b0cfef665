"""`diloco simulate`: reading the peers (from flags, files, offers), and writing the report and the plot."""
