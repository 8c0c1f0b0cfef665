/* Network namespaces without names: each is gone with the last process and descriptor that holds it. */
#ifndef NAMESPACES_H
#define NAMESPACES_H

#include <stdint.h>
#include <sys/types.h>

#define PEER_DEVICE "wan0"

typedef struct {
    int fd;
    ino_t inode;
    int counters_fd; /* /proc/net/dev as the namespace sees it */
} Namespace;

typedef struct {
    const char *congestion;
    const char *buffer_bytes; /* the most that TCP's autotuning gives a socket, each way */
} TcpOptions;

/* Prints what failed, and why, and ends the program; unless ok. */
void check(int ok, const char *what);

/* Namespaces may use only what the machine lets its users have: adds this algorithm to that list, and leaves it there. */
void allow_congestion_control(const char *name);

/* Makes one and enters it; in a peer's, TCP is set up. */
Namespace namespace_create(const TcpOptions *peer);

void namespace_enter(const Namespace *namespace);

/* The namespace's /proc/sys/net/<name>; only from within. */
void write_sysctl(const char *name, const char *value);

/* Bytes that the peer's device has sent and received, by the interface's own counters. */
void namespace_counters(const Namespace *namespace, uint64_t *sent, uint64_t *received);

/* SIGKILL to every process in these namespaces, until none is left. */
void namespaces_kill(const Namespace *namespaces, int n);

#endif
