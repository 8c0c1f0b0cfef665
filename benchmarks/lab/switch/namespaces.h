/* Network namespaces without names: each is deleted with the last process or descriptor that refers to it. */
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

/* Unless ok, prints what failed and errno's message, and exits. */
void check(int ok, const char *what);

/* Namespaces can use only algorithms that the machine allows its users: adds this one to that list for good. */
void allow_congestion_control(const char *name);

/* Creates and enters a namespace. `peer` has the TCP options of a peer's namespace, NULL for the core. */
Namespace namespace_create(const TcpOptions *peer);

void namespace_enter(const Namespace *namespace);

/* Writes /proc/sys/net/<name> of the current namespace. */
void write_sysctl(const char *name, const char *value);

/* Bytes that the peer's device has sent and received, by the interface's own counters. */
void namespace_counters(const Namespace *namespace, uint64_t *sent, uint64_t *received);

/* Sends SIGKILL to all processes in these namespaces until none is left. */
void namespaces_kill(const Namespace *namespaces, int n);

#endif
