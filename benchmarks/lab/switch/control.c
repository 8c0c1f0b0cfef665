#include "control.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

static bool set_link(Network *network, const char *line) {
    int peer;
    double up, down;
    long delay_ns;
    unsigned long up_queue, down_queue;
    unsigned loss_ppm;
    if (sscanf(line, "link %d %lf %lf %ld %lu %lu %u", &peer, &up, &down, &delay_ns, &up_queue, &down_queue,
               &loss_ppm) != 7 ||
        peer < 0 || peer >= network->num_peers || up <= 0 || down <= 0)
        return false;
    Link *uplink = &network->up[peer], *downlink = &network->down[peer];
    uplink->bytes_per_s = up, downlink->bytes_per_s = down;
    uplink->delay_ns = downlink->delay_ns = delay_ns;
    uplink->queue_bytes = up_queue, downlink->queue_bytes = down_queue;
    /* On the uplink only, so that a packet from one peer to another is subject to loss once. */
    uplink->loss_ppm = loss_ppm;
    return true;
}

static bool set_rule(Network *network, const char *line) {
    static const char *const names[] = {[PASS] = "pass", [REFUSE_CONNECTIONS] = "refuse", [DROP] = "drop"};
    int from, to;
    char name[16];
    if (sscanf(line, "rule %d %d %15s", &from, &to, name) != 3 || from < 0 || to < 0 ||
        from >= network->num_peers || to >= network->num_peers)
        return false;
    for (Rule rule = PASS; rule <= DROP; rule++)
        if (!strcmp(name, names[rule])) {
            network->rules[from][to] = rule;
            return true;
        }
    return false;
}

static void print_stats(const Network *network) {
    for (int i = 0; i < network->num_peers; i++) {
        const Link *up = &network->up[i], *down = &network->down[i];
        uint64_t sent, received;
        namespace_counters(&network->namespaces[i], &sent, &received);
        printf("%c{\"sent_bytes\":%lu,\"received_bytes\":%lu,\"up_wire_bytes\":%lu,\"down_wire_bytes\":%lu,"
               "\"up_drops\":%lu,\"down_drops\":%lu,\"lost\":%lu}",
               i ? ',' : '[', sent, received, up->wire_bytes, down->wire_bytes, up->num_dropped,
               down->num_dropped, up->num_lost);
    }
    puts("]");
}

static void obey(Network *network, const char *line) {
    if (!strcmp(line, "stats"))
        print_stats(network);
    else
        puts(set_link(network, line) || set_rule(network, line) ? "ok" : "not understood");
    fflush(stdout);
}

bool control_serve(Network *network) {
    static char text[4096];
    static size_t length;
    ssize_t got = read(STDIN_FILENO, text + length, sizeof text - 1 - length);
    if (got <= 0) return false;
    length += (size_t)got;
    text[length] = 0;
    char *line = text;
    for (char *end; (end = strchr(line, '\n')); line = end + 1) {
        *end = 0;
        obey(network, line);
    }
    length -= (size_t)(line - text);
    memmove(text, line, length);
    return true;
}
