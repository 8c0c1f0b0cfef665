#define _GNU_SOURCE
#include "namespaces.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { KILL_ROUNDS = 200, KILL_PAUSE_US = 10000 };

void check(int ok, const char *what) {
    if (ok) return;
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(1);
}

void write_sysctl(const char *name, const char *value) {
    char path[128];
    snprintf(path, sizeof path, "/proc/sys/net/%s", name);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    check(fd >= 0 && write(fd, value, strlen(value)) == (ssize_t)strlen(value), path);
    close(fd);
}

void allow_congestion_control(const char *name) {
    char allowed[512] = " ";
    int fd = open("/proc/sys/net/ipv4/tcp_allowed_congestion_control", O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? -1 : read(fd, allowed + 1, 256);
    check(length > 0, "tcp_allowed_congestion_control");
    close(fd);
    char wanted[64];
    allowed[length] = ' '; /* in place of the newline */
    snprintf(wanted, sizeof wanted, " %s ", name);
    if (strstr(allowed, wanted)) return;
    strcat(allowed, name);
    write_sysctl("ipv4/tcp_allowed_congestion_control", allowed + 1);
}

static void configure_tcp(const TcpOptions *options) {
    char buffers[64];
    write_sysctl("ipv4/tcp_congestion_control", options->congestion);
    snprintf(buffers, sizeof buffers, "4096 131072 %s", options->buffer_bytes);
    write_sysctl("ipv4/tcp_rmem", buffers);
    write_sysctl("ipv4/tcp_wmem", buffers);
    /* Otherwise a connection would start with the cached metrics of an earlier one to the same address. */
    write_sysctl("ipv4/tcp_no_metrics_save", "1");
    /* No slow start after a pause, so that pauses between rounds do not affect their duration. */
    write_sysctl("ipv4/tcp_slow_start_after_idle", "0");
}

Namespace namespace_create(const TcpOptions *peer) {
    check(unshare(CLONE_NEWNET) == 0, "a new network namespace");
    Namespace made = {.fd = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC),
                      .counters_fd = open("/proc/thread-self/net/dev", O_RDONLY | O_CLOEXEC)};
    struct stat status;
    check(made.fd >= 0 && made.counters_fd >= 0 && fstat(made.fd, &status) == 0, "/proc/self/ns/net");
    made.inode = status.st_ino;
    if (peer) configure_tcp(peer);
    return made;
}

void namespace_enter(const Namespace *namespace) {
    check(setns(namespace->fd, CLONE_NEWNET) == 0, "setns");
}

void namespace_counters(const Namespace *namespace, uint64_t *sent, uint64_t *received) {
    char text[4096];
    ssize_t length = pread(namespace->counters_fd, text, sizeof text - 1, 0);
    text[length > 0 ? length : 0] = 0;
    const char *line = strstr(text, PEER_DEVICE ":");
    *sent = *received = 0;
    /* Receive: bytes packets errs drop fifo frame compressed multicast; transmit: bytes ... */
    if (line)
        sscanf(line + strlen(PEER_DEVICE ":"), "%lu %*u %*u %*u %*u %*u %*u %*u %lu", received, sent);
}

static bool is_in(pid_t pid, const Namespace *namespaces, int n) {
    char path[64];
    struct stat status;
    snprintf(path, sizeof path, "/proc/%d/ns/net", pid);
    if (stat(path, &status) != 0) return false;
    for (int i = 0; i < n; i++)
        if (namespaces[i].inode == status.st_ino) return true;
    return false;
}

static int kill_once(const Namespace *namespaces, int n) {
    int num_found = 0;
    DIR *processes = opendir("/proc");
    check(processes != NULL, "/proc");
    for (struct dirent *entry; (entry = readdir(processes));) {
        pid_t pid = isdigit((unsigned char)entry->d_name[0]) ? atoi(entry->d_name) : getpid();
        if (pid == getpid() || !is_in(pid, namespaces, n)) continue;
        num_found++;
        kill(pid, SIGKILL);
    }
    closedir(processes);
    return num_found;
}

void namespaces_kill(const Namespace *namespaces, int n) {
    for (int round = 0; round < KILL_ROUNDS && kill_once(namespaces, n); round++) usleep(KILL_PAUSE_US);
}
