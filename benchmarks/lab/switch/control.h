/* The commands of the laboratory to the running switch: one line on stdin each, answered by one line on stdout.
 *
 *   link PEER UP_BYTES_PER_S DOWN_BYTES_PER_S DELAY_NS UP_QUEUE_BYTES DOWN_QUEUE_BYTES LOSS_PPM   -> ok
 *   rule FROM TO pass|refuse|drop                                                                 -> ok
 *   stats                                                                     -> a JSON array, one object a peer
 */
#ifndef CONTROL_H
#define CONTROL_H

#include "link.h"
#include "namespaces.h"

typedef enum { PASS, REFUSE_CONNECTIONS, DROP } Rule;

typedef struct {
    int num_peers;
    Namespace namespaces[MAX_PEERS];
    Link up[MAX_PEERS], down[MAX_PEERS];
    Rule rules[MAX_PEERS][MAX_PEERS]; /* [from][to] */
} Network;

/* Reads and carries out the commands on stdin. Returns false at end of file: the laboratory is gone. */
bool control_serve(Network *network);

#endif
