#define _GNU_SOURCE
#include "forward_rules.h"

#include <limits.h>
#include <net/if.h>
#include <linux/netfilter/xt_NFQUEUE.h>
#include <linux/netfilter_ipv4/ip_tables.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "namespaces.h"

/* What `iptables -A FORWARD -i p0 -o p1 -j NFQUEUE --queue-num 1` would write, for machines without iptables. */
typedef struct {
    struct ipt_entry entry;
    struct xt_entry_target target;
    union {
        int verdict;
        struct xt_NFQ_info queue;
        char error[XT_FUNCTION_MAXNAMELEN];
    } data;
} FirewallRule;

enum {
    ACCEPT_BYTES = sizeof(struct ipt_entry) + XT_ALIGN(sizeof(struct xt_standard_target)),
    QUEUE_BYTES = sizeof(struct ipt_entry) + XT_ALIGN(sizeof(struct xt_entry_target) + sizeof(struct xt_NFQ_info)),
    ERROR_BYTES = sizeof(struct ipt_entry) + XT_ALIGN(sizeof(struct xt_error_target)),
};

static char *append(char *at, const char *target, const FirewallRule *like, unsigned size) {
    FirewallRule rule = *like;
    rule.entry.target_offset = sizeof(struct ipt_entry);
    rule.entry.next_offset = (uint16_t)size;
    rule.target.u.user.target_size = (uint16_t)(size - sizeof(struct ipt_entry));
    strcpy(rule.target.u.user.name, target);
    memcpy(at, &rule, size < sizeof rule ? size : sizeof rule);
    return at + size;
}

static char *append_accept(char *at) {
    return append(at, XT_STANDARD_TARGET, &(FirewallRule){.data.verdict = -NF_ACCEPT - 1}, ACCEPT_BYTES);
}

static char *append_queue(char *at, int from, int to, int n) {
    FirewallRule rule = {.data.queue.queuenum = (uint16_t)(from * n + to)};
    int in_length = sprintf(rule.entry.ip.iniface, "p%d", from);
    int out_length = sprintf(rule.entry.ip.outiface, "p%d", to);
    memset(rule.entry.ip.iniface_mask, 0xff, (size_t)in_length + 1);
    memset(rule.entry.ip.outiface_mask, 0xff, (size_t)out_length + 1);
    return append(at, "NFQUEUE", &rule, QUEUE_BYTES);
}

void forward_rules_install(int n) {
    unsigned num_queues = (unsigned)(n * (n - 1));
    unsigned size = 3 * ACCEPT_BYTES + num_queues * QUEUE_BYTES + ERROR_BYTES;
    struct ipt_replace *table = calloc(1, sizeof *table + size);
    /* The kernel hands back the counters of the rules it drops: those of an empty table. */
    struct xt_counters old_counters[8];
    check(table != NULL, "memory");
    strcpy(table->name, "filter");
    table->valid_hooks = 1 << NF_INET_LOCAL_IN | 1 << NF_INET_FORWARD | 1 << NF_INET_LOCAL_OUT;
    table->num_entries = num_queues + 4, table->size = size;
    table->counters = old_counters;

    char *start = (char *)table->entries, *at = append_accept(start);
    table->hook_entry[NF_INET_FORWARD] = (unsigned)(at - start);
    for (int from = 0; from < n; from++)
        for (int to = 0; to < n; to++)
            if (from != to) at = append_queue(at, from, to, n);
    table->underflow[NF_INET_FORWARD] = (unsigned)(at - start);
    at = append_accept(at);
    table->hook_entry[NF_INET_LOCAL_OUT] = table->underflow[NF_INET_LOCAL_OUT] = (unsigned)(at - start);
    at = append_accept(at);
    append(at, XT_ERROR_TARGET, &(FirewallRule){.data.error = XT_ERROR_TARGET}, ERROR_BYTES);

    int sock = socket(AF_INET, SOCK_RAW | SOCK_CLOEXEC, IPPROTO_RAW);
    struct ipt_getinfo info = {.name = "filter"};
    socklen_t length = sizeof info;
    check(sock >= 0 && getsockopt(sock, IPPROTO_IP, IPT_SO_GET_INFO, &info, &length) == 0, "iptables filter");
    check(info.num_entries <= 8, "an iptables filter table that is not empty");
    table->num_counters = info.num_entries;
    check(setsockopt(sock, IPPROTO_IP, IPT_SO_SET_REPLACE, table, sizeof *table + size) == 0, "iptables NFQUEUE");
    close(sock);
    free(table);
}
