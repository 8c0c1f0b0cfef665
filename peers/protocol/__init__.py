"""The wire format of control messages: structs with their limits in the types, certificates, signatures.

Start with messages.py (what peers tell each other about the run), then certificates.py (the chain that they sign).
wire.py encodes and decodes all structs as msgpack; net/channel.py puts a length before each. mesh.py lists all messages
of a mesh channel, records.py what the DHT holds, admission.py what newcomers ask for.

The values of a reduction are not structs: their frames are in reduce/frames.py, their encoding in reduce/codecs.py.
"""
