#define _GNU_SOURCE
#include "held.h"

#include <arpa/inet.h>
#include <errno.h>
#include <linux/netfilter.h>
#include <linux/netfilter/nfnetlink.h>
#include <linux/netfilter/nfnetlink_queue.h>
#include <linux/netlink.h>
#include <netinet/ip.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/socket.h>

#include "forward_rules.h"
#include "namespaces.h"

enum {
    COPIED_BYTES = 128, /* of every packet: its headers */
    MAX_HELD = 1 << 16,
    RECEIVE_BUFFER = 64 << 20,
    RECEIVES_A_TURN = 1024,
    VERDICT_BYTES = NLMSG_LENGTH(sizeof(struct nfgenmsg)) + NLA_HDRLEN + sizeof(struct nfqnl_msg_verdict_hdr),
};

static int num_peers;
static uint32_t mtu;

static uint16_t queue_of(int from, int to) { return (uint16_t)(from * num_peers + to); }

static struct nlmsghdr *begin(char *buffer, uint16_t type, uint16_t queue) {
    struct nlmsghdr *header = (struct nlmsghdr *)buffer;
    *header = (struct nlmsghdr){.nlmsg_len = NLMSG_LENGTH(sizeof(struct nfgenmsg)),
                                .nlmsg_type = NFNL_SUBSYS_QUEUE << 8 | type,
                                .nlmsg_flags = NLM_F_REQUEST};
    *(struct nfgenmsg *)NLMSG_DATA(header) =
        (struct nfgenmsg){.nfgen_family = AF_UNSPEC, .version = NFNETLINK_V0, .res_id = htons(queue)};
    return header;
}

static void add(struct nlmsghdr *header, uint16_t type, const void *value, uint16_t length) {
    struct nlattr *attribute = (struct nlattr *)((char *)header + NLMSG_ALIGN(header->nlmsg_len));
    *attribute = (struct nlattr){.nla_len = NLA_HDRLEN + length, .nla_type = type};
    memcpy((char *)attribute + NLA_HDRLEN, value, length);
    header->nlmsg_len = NLMSG_ALIGN(header->nlmsg_len) + NLA_ALIGN(attribute->nla_len);
}

static void add_u32(struct nlmsghdr *header, uint16_t type, uint32_t value) {
    value = htonl(value);
    add(header, type, &value, sizeof value);
}

static void bind_queue(int fd, uint16_t queue) {
    char buffer[256];
    struct nlmsghdr *header = begin(buffer, NFQNL_MSG_CONFIG, queue);
    struct nfqnl_msg_config_cmd command = {.command = NFQNL_CFG_CMD_BIND};
    struct nfqnl_msg_config_params parameters = {.copy_range = htonl(COPIED_BYTES),
                                                 .copy_mode = NFQNL_COPY_PACKET};
    add(header, NFQA_CFG_CMD, &command, sizeof command);
    add(header, NFQA_CFG_PARAMS, &parameters, sizeof parameters);
    add_u32(header, NFQA_CFG_QUEUE_MAXLEN, MAX_HELD);
    /* Packets of 64 KB come whole, without checksums computed for us. */
    add_u32(header, NFQA_CFG_FLAGS, NFQA_CFG_F_GSO);
    add_u32(header, NFQA_CFG_MASK, NFQA_CFG_F_GSO);
    header->nlmsg_flags |= NLM_F_ACK;
    check(send(fd, buffer, header->nlmsg_len, 0) > 0, "NFQUEUE");
    struct {
        struct nlmsghdr header;
        struct nlmsgerr error;
        char request[sizeof buffer];
    } answer;
    check(recv(fd, &answer, sizeof answer, 0) > 0 && answer.header.nlmsg_type == NLMSG_ERROR, "NFQUEUE");
    errno = -answer.error.error;
    check(errno == 0, "NFQUEUE");
}

int held_open(int n, uint32_t mtu_bytes) {
    num_peers = n, mtu = mtu_bytes;
    int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_NETFILTER);
    struct sockaddr_nl address = {.nl_family = AF_NETLINK};
    check(fd >= 0 && bind(fd, (void *)&address, sizeof address) == 0, "netlink");
    int yes = 1, size = RECEIVE_BUFFER;
    check(setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &size, sizeof size) == 0, "SO_RCVBUFFORCE");
    setsockopt(fd, SOL_NETLINK, NETLINK_NO_ENOBUFS, &yes, sizeof yes);
    for (int from = 0; from < n; from++)
        for (int to = 0; to < n; to++)
            if (from != to) bind_queue(fd, queue_of(from, to));
    forward_rules_install(n);
    return fd;
}

/* IP bytes as they would be on the wire, where every segment has headers of its own. */
static uint32_t wire_bytes(const struct iphdr *ip, uint32_t tcp_header_bytes) {
    uint32_t total = ntohs(ip->tot_len), headers = ip->ihl * 4u + tcp_header_bytes;
    if (total <= mtu) return total;
    uint32_t payload = total - headers, segment = mtu - headers;
    return payload + (payload + segment - 1) / segment * headers;
}

static bool parse(const struct nlmsghdr *message, HeldPacket *packet) {
    if (message->nlmsg_type != (NFNL_SUBSYS_QUEUE << 8 | NFQNL_MSG_PACKET)) return false;
    uint16_t queue = ntohs(((struct nfgenmsg *)NLMSG_DATA(message))->res_id);
    *packet = (HeldPacket){.from = queue / num_peers, .to = queue % num_peers};
    const char *end = (const char *)message + message->nlmsg_len;
    const char *at = (const char *)NLMSG_DATA(message) + NLMSG_ALIGN(sizeof(struct nfgenmsg));
    bool has_payload = false;
    while (at + NLA_HDRLEN <= end) {
        const struct nlattr *attribute = (const void *)at;
        const void *value = at + NLA_HDRLEN;
        if (attribute->nla_type == NFQA_PACKET_HDR)
            packet->id = ntohl(((const struct nfqnl_msg_packet_hdr *)value)->packet_id);
        if (attribute->nla_type == NFQA_PAYLOAD) {
            const struct iphdr *ip = value;
            const struct tcphdr *tcp = (const void *)((const char *)value + ip->ihl * 4);
            bool is_tcp = ip->protocol == IPPROTO_TCP;
            packet->wire_bytes = wire_bytes(ip, is_tcp ? tcp->doff * 4u : 8);
            packet->opens_connection = !is_tcp || (tcp->syn && !tcp->ack);
            has_payload = true;
        }
        at += NLA_ALIGN(attribute->nla_len);
    }
    return has_payload;
}

void held_receive(int fd, void (*take)(void *context, const HeldPacket *packet), void *context) {
    char buffer[4096];
    for (int i = 0; i < RECEIVES_A_TURN; i++) {
        ssize_t left = recv(fd, buffer, sizeof buffer, MSG_DONTWAIT);
        if (left <= 0) return;
        HeldPacket packet;
        for (struct nlmsghdr *m = (void *)buffer; NLMSG_OK(m, left); m = NLMSG_NEXT(m, left))
            if (parse(m, &packet)) take(context, &packet);
    }
}

static char verdicts[64 * NLMSG_ALIGN(VERDICT_BYTES)];
static size_t verdict_bytes;

void held_release(int fd, int from, int to, uint32_t id, bool is_passed) {
    struct nlmsghdr *header = begin(verdicts + verdict_bytes, NFQNL_MSG_VERDICT, queue_of(from, to));
    struct nfqnl_msg_verdict_hdr verdict = {.verdict = htonl(is_passed ? NF_ACCEPT : NF_DROP),
                                            .id = htonl(id)};
    add(header, NFQA_VERDICT_HDR, &verdict, sizeof verdict);
    verdict_bytes += NLMSG_ALIGN(header->nlmsg_len);
    if (verdict_bytes + NLMSG_ALIGN(VERDICT_BYTES) > sizeof verdicts) held_flush(fd);
}

void held_flush(int fd) {
    if (verdict_bytes) send(fd, verdicts, verdict_bytes, 0);
    verdict_bytes = 0;
}
