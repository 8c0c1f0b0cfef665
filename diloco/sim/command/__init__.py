"""`diloco simulate`: reading the peers (from flags or a file), and writing the report and the plot."""
