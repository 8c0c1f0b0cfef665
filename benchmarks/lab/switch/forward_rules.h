/* The firewall rules of the core: packets from device p<i> to p<j> go to the NFQUEUE with number i * n + j. */
#ifndef FORWARD_RULES_H
#define FORWARD_RULES_H

/* Replaces the filter table of the current namespace. */
void forward_rules_install(int num_peers);

#endif
