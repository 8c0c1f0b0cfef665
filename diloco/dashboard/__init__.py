"""`diloco dashboard`: a web page that shows a swarm, live and read-only.

Start with server.py; feed.py is what the page is told, static/ the page.
"""
