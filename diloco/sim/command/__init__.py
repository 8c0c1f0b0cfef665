"""`diloco simulate`: reading quantities, and writing the report and the plot."""
