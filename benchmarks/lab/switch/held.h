/* Packets that the kernel holds back until we let them go (NFQUEUE): their bytes never come into this process.
 *
 * Every ordered pair of peers has a queue of its own, from which packets mostly leave in the order in which they came,
 * because the kernel looks them up from the front. */
#ifndef HELD_H
#define HELD_H

#include <stdbool.h>
#include <stdint.h>

typedef struct {
    uint32_t id;
    int from, to;
    uint32_t wire_bytes;
    bool opens_connection; /* a first packet of a handshake, or not TCP, which has none to tell the opener by */
} HeldPacket;

/* Hold all that is forwarded between the devices p0, p1, ... of the present namespace. Returns the socket to poll. */
int held_open(int num_peers, uint32_t mtu);

/* Calls `take` for each packet that has come in, a bounded number of them. */
void held_receive(int fd, void (*take)(void *context, const HeldPacket *packet), void *context);

/* Verdicts go out together, at the latest with held_flush. */
void held_release(int fd, int from, int to, uint32_t id, bool is_passed);
void held_flush(int fd);

#endif
