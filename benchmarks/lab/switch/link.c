#include "link.h"

#include <stdlib.h>

enum { SMALL_BYTES = 256 };

static Ring ring_create(void) {
    Ring ring = {.packets = calloc(MAX_PACKETS, sizeof(Packet))};
    if (!ring.packets) abort();
    return ring;
}

static bool is_empty(const Ring *ring) { return ring->head == ring->tail; }

static bool is_full(const Ring *ring) { return ring->tail - ring->head == MAX_PACKETS; }

static Packet *front(const Ring *ring) { return &ring->packets[ring->head % MAX_PACKETS]; }

static void append(Ring *ring, Packet packet) {
    /* If the delay has been reduced meanwhile, packets must not overtake earlier ones. */
    if (!is_empty(ring)) {
        int64_t last_ns = ring->packets[(ring->tail - 1) % MAX_PACKETS].at_ns;
        if (packet.at_ns < last_ns) packet.at_ns = last_ns;
    }
    ring->packets[ring->tail++ % MAX_PACKETS] = packet;
}

void link_init(Link *link, int num_flows, uint64_t seed) {
    *link = (Link){.random_state = seed * 0x9E3779B97F4A7C15u + 1, .bytes_per_s = 1e9};
    link->small = ring_create(), link->large = ring_create();
    for (int i = 0; i < num_flows; i++) link->flows[i].waiting = ring_create();
}

/* xorshift64*, so that every run has the same losses. */
static bool is_lost(Link *link) {
    if (!link->loss_ppm) return false;
    uint64_t x = link->random_state;
    x ^= x >> 12, x ^= x << 25, x ^= x >> 27;
    link->random_state = x;
    return (x * 0x2545F4914F6CDD1Du >> 32) % 1000000 < link->loss_ppm;
}

static void depart(Link *link, Ring *way, Packet packet, int64_t start_ns) {
    int64_t took_ns = (int64_t)(packet.wire_bytes * 1e9 / link->bytes_per_s);
    link->free_at_ns = (link->free_at_ns > start_ns ? link->free_at_ns : start_ns) + took_ns;
    packet.at_ns = start_ns + took_ns + link->delay_ns;
    link->wire_bytes += packet.wire_bytes;
    append(way, packet);
}

/* The queue's capacity is divided equally among the flows that use it. */
static bool has_room(const Link *link, const Flow *flow) {
    uint64_t num_waiting = is_empty(&flow->waiting);
    for (int i = 0; i < MAX_PEERS; i++) num_waiting += link->flows[i].waiting_bytes > 0;
    return !is_full(&flow->waiting) && flow->waiting_bytes <= link->queue_bytes / num_waiting;
}

static Flow *next_flow(Link *link) {
    Flow *next = NULL;
    for (int i = 0; i < MAX_PEERS; i++) {
        Flow *flow = &link->flows[i];
        if (flow->waiting_bytes && (!next || flow->served_bytes < next->served_bytes)) next = flow;
    }
    return next;
}

void link_run(Link *link, int64_t until_ns) {
    for (Flow *flow; link->free_at_ns <= until_ns && !is_full(&link->large) && (flow = next_flow(link));) {
        Packet packet = *front(&flow->waiting);
        flow->waiting.head++;
        flow->waiting_bytes -= packet.wire_bytes;
        link->served_bytes = flow->served_bytes;
        flow->served_bytes += packet.wire_bytes;
        int64_t start_ns = link->free_at_ns > packet.at_ns ? link->free_at_ns : packet.at_ns;
        depart(link, &link->large, packet, start_ns);
    }
}

bool link_push(Link *link, Packet packet, int64_t now_ns) {
    link_run(link, now_ns);
    if (is_lost(link)) {
        link->num_lost++;
        return false;
    }
    Flow *flow = &link->flows[packet.flow];
    bool is_small = packet.wire_bytes <= SMALL_BYTES;
    if (is_small ? is_full(&link->small) : !has_room(link, flow)) {
        link->num_dropped++;
        return false;
    }
    packet.at_ns = now_ns;
    if (is_small) {
        depart(link, &link->small, packet, now_ns);
        return true;
    }
    /* A flow that was idle must not get a larger share to catch up. */
    if (is_empty(&flow->waiting) && flow->served_bytes < link->served_bytes)
        flow->served_bytes = link->served_bytes;
    flow->waiting_bytes += packet.wire_bytes;
    append(&flow->waiting, packet);
    return true;
}

int64_t link_next_ns(const Link *link) {
    int64_t small = is_empty(&link->small) ? INT64_MAX : front(&link->small)->at_ns;
    int64_t large = is_empty(&link->large) ? INT64_MAX : front(&link->large)->at_ns;
    return small < large ? small : large;
}

Packet link_pop(Link *link) {
    bool is_small = !is_empty(&link->small) && front(&link->small)->at_ns == link_next_ns(link);
    Ring *way = is_small ? &link->small : &link->large;
    Packet packet = *front(way);
    way->head++;
    return packet;
}

bool link_is_idle(const Link *link) {
    for (int i = 0; i < MAX_PEERS; i++)
        if (link->flows[i].waiting_bytes) return false;
    return link_next_ns(link) == INT64_MAX;
}
