"""`diloco dashboard`: a web page that shows a swarm, live and read-only.

Start with server.py; feed.py makes the stream of updates, static/ is the page.
"""
