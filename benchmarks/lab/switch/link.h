/* One direction of one peer's access link: bounded queues, a serialiser, a propagation delay.
 *
 * As behind a router with CAKE: every peer at the other end has a queue of its own and an equal share of the rate, and
 * small packets (acknowledgements, requests) do not wait behind data. Plain FIFOs leave a quarter of the rate unused
 * when everybody sends to everybody, since acknowledgements then queue behind the data of the other direction and some
 * connections starve.
 *
 * All times are CLOCK_MONOTONIC nanoseconds. Departures are computed from when the link becomes free, so that a late
 * wake-up of the switch delays packets but takes no bandwidth away. */
#ifndef LINK_H
#define LINK_H

#include <stdbool.h>
#include <stdint.h>

enum { MAX_PEERS = 32, MAX_PACKETS = 1 << 14 };

typedef struct {
    int64_t at_ns;       /* of its arrival in a queue, then of its departure */
    uint32_t wire_bytes; /* IP bytes, the headers of every segment included */
    uint32_t id;         /* what the kernel, which keeps the packet, calls it within its queue */
    uint16_t from, to;
    uint16_t flow; /* the peer at the other end of this link */
} Packet;

typedef struct {
    Packet *packets;
    uint32_t head, tail;
} Ring;

typedef struct {
    Ring waiting;
    uint64_t waiting_bytes;
    double served_bytes; /* the least served goes next */
} Flow;

typedef struct {
    double bytes_per_s;
    int64_t delay_ns;
    uint64_t queue_bytes;
    uint32_t loss_ppm;

    Flow flows[MAX_PEERS];
    Ring small, large; /* on their way, in the order of their departures */
    int64_t free_at_ns;
    double served_bytes; /* what a flow has been served that was never idle */
    uint64_t random_state;

    uint64_t num_dropped, num_lost, wire_bytes;
} Link;

void link_init(Link *link, int num_flows, uint64_t seed);

/* Takes the packet, which arrives now, no earlier than those before; false: it is lost, or its queue is full. */
bool link_push(Link *link, Packet packet, int64_t now_ns);

/* Sends what can be sent until then. */
void link_run(Link *link, int64_t until_ns);

/* When the next packet comes out; INT64_MAX while none is on its way. */
int64_t link_next_ns(const Link *link);

/* That packet; only while there is one. */
Packet link_pop(Link *link);

/* Nothing is queued or on its way. */
bool link_is_idle(const Link *link);

#endif
