/* The firewall rules of the core: what goes from device p<i> to p<j> is queued under number i * n + j. */
#ifndef FORWARD_RULES_H
#define FORWARD_RULES_H

/* In the present namespace, in place of the filter table it has. */
void forward_rules_install(int num_peers);

#endif
