/* One direction of one peer's access link: bounded queues, a serialiser, a propagation delay.
 *
 * As with a router that runs CAKE, every peer at the other end has a queue of its own and an equal share of the rate,
 * and small packets (acknowledgements, requests) do not wait behind data. With plain FIFOs, a quarter of the rate is
 * unused when all peers send to all, since acknowledgements queue behind the data of the other direction and some
 * connections starve.
 *
 * All times are CLOCK_MONOTONIC nanoseconds. Departures are computed from the time at which the link becomes free, so a
 * late wake-up of the switch delays packets but does not reduce the bandwidth. */
#ifndef LINK_H
#define LINK_H

#include <stdbool.h>
#include <stdint.h>

enum { MAX_PEERS = 32, MAX_PACKETS = 1 << 14 };

typedef struct {
    int64_t at_ns;       /* time of its arrival in a queue, then of its departure */
    uint32_t wire_bytes; /* IP bytes, including the headers of every segment */
    uint32_t id;         /* the kernel's id of the packet within its NFQUEUE */
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
    double served_bytes; /* the flow with the least is served next */
} Flow;

typedef struct {
    double bytes_per_s;
    int64_t delay_ns;
    uint64_t queue_bytes;
    uint32_t loss_ppm;

    Flow flows[MAX_PEERS];
    Ring small, large; /* packets in flight, in the order of their departures */
    int64_t free_at_ns;
    double served_bytes; /* the served_bytes of a flow that was never idle */
    uint64_t random_state;

    uint64_t num_dropped, num_lost, wire_bytes;
} Link;

void link_init(Link *link, int num_flows, uint64_t seed);

/* Adds a packet that arrives now; times must not decrease. Returns false if it is lost or its queue is full. */
bool link_push(Link *link, Packet packet, int64_t now_ns);

/* Sends the packets that can be sent until this time. */
void link_run(Link *link, int64_t until_ns);

/* The time at which the next packet departs; INT64_MAX if none is in flight. */
int64_t link_next_ns(const Link *link);

/* Removes and returns that packet, which must exist. */
Packet link_pop(Link *link);

/* Whether no packet is queued or in flight. */
bool link_is_idle(const Link *link);

#endif
