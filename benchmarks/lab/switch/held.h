/* Packets that the kernel holds back until we release them (NFQUEUE); their payload is never copied to this process.
 *
 * Every ordered pair of peers has a queue of its own, in which packets are mostly released in order, because the kernel
 * searches a queue from its front. */
#ifndef HELD_H
#define HELD_H

#include <stdbool.h>
#include <stdint.h>

typedef struct {
    uint32_t id;
    int from, to;
    uint32_t wire_bytes;
    bool opens_connection; /* the first packet of a TCP handshake; also true for all packets that are not TCP */
} HeldPacket;

/* Holds all packets forwarded between the devices p0, p1, ... of the current namespace. Returns the socket to poll. */
int held_open(int num_peers, uint32_t mtu);

/* Calls `take` for each packet that has arrived, up to a limit. */
void held_receive(int fd, void (*take)(void *context, const HeldPacket *packet), void *context);

/* Passes or drops a packet. Verdicts are batched and sent at the latest by held_flush. */
void held_release(int fd, int from, int to, uint32_t id, bool is_passed);
void held_flush(int fd);

#endif
