"""`diloco simulate`: the peers it is given (flags, files, offers), and the report and plot that it shows."""
