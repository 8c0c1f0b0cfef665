"""`diloco dashboard`: a web page that shows a swarm, live."""
