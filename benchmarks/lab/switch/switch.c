/* The core of a network whose peers are namespaces, with emulated access links.
 *
 *   switch NUM_PEERS MTU CONGESTION BUFFER_BYTES
 *
 * peer -> uplink (rate, queue, delay) -> core, without limits -> downlink (rate, queue, delay) -> peer
 *
 * The kernel forwards the packets; this program only decides when. It prints "ready CORE PEER PEER ..." with its
 * descriptors of the namespaces, in which its parent creates the devices (p0, p1, ... in the core, wan0 in a peer's).
 * Then it carries out the commands of control.h until stdin ends, its parent dies, or SIGTERM. At the end it kills all
 * processes in the namespaces, which are deleted with it. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "control.h"
#include "held.h"

enum { LOOK_FOR_PARENT_S = 1 };
/* Limits of the polling interval (tick) while packets are in flight. Waking up for each packet would use half a core at
 * 4 Gbit/s. With long delays, where exact times matter less, the tick is longer and disturbs other programs less.
 * Packets that arrive during a tick count as arriving at its end, half a tick late on average. */
static const int64_t LEAST_TICK_NS = 200000, MOST_TICK_NS = 1000000;
enum { TICKS_A_WAY = 16 };

static Network network;
static int held_fd;
static volatile sig_atomic_t is_stopped;

static void stop(int signal) {
    (void)signal;
    is_stopped = 1;
}

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000L + time.tv_nsec;
}

static void enter_uplink(void *context, const HeldPacket *held) {
    (void)context;
    Rule rule = network.rules[held->from][held->to];
    Packet packet = {.wire_bytes = held->wire_bytes,
                     .id = held->id,
                     .from = (uint16_t)held->from,
                     .to = (uint16_t)held->to,
                     .flow = (uint16_t)held->to};
    bool is_allowed = rule == PASS || (rule == REFUSE_CONNECTIONS && !held->opens_connection);
    if (!is_allowed || !link_push(&network.up[held->from], packet, now_ns()))
        held_release(held_fd, held->from, held->to, held->id, false);
}

/* Moves packets from the uplinks to the downlinks, in the order of their arrival there. */
static void forward(int64_t until_ns) {
    for (int i = 0; i < network.num_peers; i++) link_run(&network.up[i], until_ns);
    for (;;) {
        int first = 0;
        for (int i = 1; i < network.num_peers; i++)
            if (link_next_ns(&network.up[i]) < link_next_ns(&network.up[first])) first = i;
        int64_t at_ns = link_next_ns(&network.up[first]);
        if (at_ns > until_ns) return;
        Packet packet = link_pop(&network.up[first]);
        packet.flow = packet.from;
        if (!link_push(&network.down[packet.to], packet, at_ns))
            held_release(held_fd, packet.from, packet.to, packet.id, false);
    }
}

static void deliver(int64_t until_ns) {
    for (int i = 0; i < network.num_peers; i++) {
        link_run(&network.down[i], until_ns);
        while (link_next_ns(&network.down[i]) <= until_ns) {
            Packet packet = link_pop(&network.down[i]);
            held_release(held_fd, packet.from, packet.to, packet.id, true);
        }
    }
}

static bool is_idle(void) {
    for (int i = 0; i < network.num_peers; i++)
        if (!link_is_idle(&network.up[i]) || !link_is_idle(&network.down[i])) return false;
    return true;
}

/* The tick: a fraction of the shortest delay between two peers, within the limits. */
static int64_t tick_ns(void) {
    int64_t least = INT64_MAX / 2, second = INT64_MAX / 2;
    for (int i = 0; i < network.num_peers; i++) {
        int64_t delay_ns = network.up[i].delay_ns;
        if (delay_ns < least)
            second = least, least = delay_ns;
        else if (delay_ns < second)
            second = delay_ns;
    }
    int64_t tick = (least + second) / TICKS_A_WAY;
    return tick < LEAST_TICK_NS ? LEAST_TICK_NS : tick > MOST_TICK_NS ? MOST_TICK_NS : tick;
}

static void run(void) {
    pid_t parent = getppid();
    struct pollfd polled[] = {{.fd = held_fd, .events = POLLIN}, {.fd = STDIN_FILENO, .events = POLLIN}};
    while (!is_stopped && getppid() == parent) {
        /* Up to half a tick early or late, so on time on average. */
        int64_t a_tick_ns = tick_ns(), horizon_ns = now_ns() + a_tick_ns / 2;
        forward(horizon_ns);
        deliver(horizon_ns);
        held_flush(held_fd);
        struct timespec tick = {.tv_nsec = a_tick_ns}, timeout = {.tv_sec = LOOK_FOR_PARENT_S};
        if (!is_idle()) {
            nanosleep(&tick, NULL);
            timeout.tv_sec = 0;
        }
        if (ppoll(polled, 2, &timeout, NULL) <= 0) continue;
        if (polled[0].revents) held_receive(held_fd, enter_uplink, NULL);
        if (polled[1].revents && !control_serve(&network)) return;
    }
}

/* Takes a real-time priority: a switch that waits for a core would look like a slow network. */
static void come_first(void) {
    struct sched_param priority = {.sched_priority = 1};
    if (sched_setscheduler(0, SCHED_RR, &priority) != 0) setpriority(PRIO_PROCESS, 0, -20);
    prctl(PR_SET_TIMERSLACK, 1000UL);
}

int main(int argc, char **argv) {
    if (argc != 5 || (network.num_peers = atoi(argv[1])) < 1 || network.num_peers > MAX_PEERS) {
        fprintf(stderr, "usage: switch NUM_PEERS MTU CONGESTION BUFFER_BYTES\n");
        return 2;
    }
    TcpOptions tcp = {.congestion = argv[3], .buffer_bytes = argv[4]};
    signal(SIGTERM, stop);
    signal(SIGPIPE, SIG_IGN);
    allow_congestion_control(tcp.congestion);
    for (int i = 0; i < network.num_peers; i++) {
        network.namespaces[i] = namespace_create(&tcp);
        link_init(&network.up[i], network.num_peers, (uint64_t)i);
        link_init(&network.down[i], network.num_peers, (uint64_t)i + MAX_PEERS);
    }
    /* Created last, since this process stays in the namespace it has created, which must be the core. */
    Namespace core = namespace_create(NULL);
    write_sysctl("ipv4/ip_forward", "1");
    held_fd = held_open(network.num_peers, (uint32_t)atoi(argv[2]));
    come_first();
    printf("ready %d", core.fd);
    for (int i = 0; i < network.num_peers; i++) printf(" %d", network.namespaces[i].fd);
    puts("");
    fflush(stdout);
    run();
    namespaces_kill(network.namespaces, network.num_peers);
    return 0;
}
