"""The transfer of the outer state from one peer to another.

Start with transfer.py, the whole state from several donors; replay.py is the commits since, server.py the donor.
"""
