/* A vendor's collective library in miniature: pairs whose bytes go over a loopback socket, moved by one thread each.
 * As on a device, what is queued on a stream counts as done when it is, and an aborted kernel counts as done.
 * It refuses what the real ones refuse, and what they would answer with wrong bytes or a hang. */
#ifndef FAKE_COLLECTIVES_H
#define FAKE_COLLECTIVES_H
#include "fake_driver.h"
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>

enum { PAIR_OK, PAIR_SYSTEM, PAIR_ARGUMENT, PAIR_USAGE, PAIR_REMOTE, PAIR_PENDING, PAIR_OOM };
#define PAIR_MAGIC 0x9a17u
#define PAIR_MAX 256

typedef struct {
  void *address;
  long queued, done;
} fake_stream;

typedef struct {
  uint32_t magic, port;
  uint64_t nonce;
} fake_root;

typedef struct fake_op {
  char *data;
  uint64_t count;
  uint32_t dtype;
  int is_send, is_launched;
  fake_stream *stream;
  struct fake_op *next;
} fake_op;

typedef struct {
  uint64_t count;
  uint32_t dtype;
} fake_header;

typedef struct fake_comm {
  uint32_t magic;
  int fd, rank, device, state;
  volatile int is_aborted;
  size_t buffer;
  double launch_at;
  fake_root root;
  fake_op *first;
  pthread_t thread;
} fake_comm;

static pthread_mutex_t pair_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t pair_changed = PTHREAD_COND_INITIALIZER;
static fake_stream pair_streams[PAIR_MAX];
static struct { uint64_t nonce; int fd; } pair_roots[PAIR_MAX];
static long fake_misuses;
static int fake_abort_ms, fake_init_ms;

/* --- what tests use ---------------------------------------------------------------------------------------------- */

long fake_num_misuses(void) { return fake_misuses; }
void fake_set_abort_ms(int ms) { fake_abort_ms = ms; }
/* How long a communicator stays in progress after both sides have joined. */
void fake_set_init_ms(int ms) { fake_init_ms = ms; }

/* --- what the vendor files use ----------------------------------------------------------------------------------- */

static fake_stream *pair_stream(void *address) {
  for (int i = 0; i < PAIR_MAX; i++) {
    if (pair_streams[i].address == NULL) pair_streams[i].address = address;
    if (pair_streams[i].address == address) return &pair_streams[i];
  }
  abort();
}

typedef struct {
  fake_stream *stream;
  long target;
} fake_event;

static void pair_record(fake_event *event, void *address) {
  pthread_mutex_lock(&pair_lock);
  event->stream = pair_stream(address);
  event->target = event->stream->queued;
  pthread_mutex_unlock(&pair_lock);
}

static int pair_is_done(const fake_event *event) {
  pthread_mutex_lock(&pair_lock);
  int is_done = event->stream->done >= event->target;
  pthread_mutex_unlock(&pair_lock);
  return is_done;
}

static int pair_root(fake_root *root) {
  struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t length = sizeof at;
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0 || bind(fd, (struct sockaddr *)&at, sizeof at) || listen(fd, 4) ||
      getsockname(fd, (struct sockaddr *)&at, &length))
    return PAIR_SYSTEM;
  *root = (fake_root){PAIR_MAGIC, ntohs(at.sin_port), ((uint64_t)getpid() << 32) ^ (uint64_t)random() ^ at.sin_port};
  pthread_mutex_lock(&pair_lock);
  int slot = 0;
  while (slot < PAIR_MAX && pair_roots[slot].nonce) slot++;
  if (slot == PAIR_MAX) abort();
  pair_roots[slot].nonce = root->nonce;
  pair_roots[slot].fd = fd;
  pthread_mutex_unlock(&pair_lock);
  return PAIR_OK;
}

/* All of it, or 0 once the pair is aborted, or -1 if the peer is gone. */
static int pair_move(fake_comm *comm, void *data, size_t size, int is_send) {
  size_t moved = 0;
  while (moved < size) {
    struct pollfd ready = {comm->fd, is_send ? POLLOUT : POLLIN, 0};
    if (comm->is_aborted) return 0;
    if (poll(&ready, 1, 5) <= 0) continue;
    ssize_t n = is_send ? send(comm->fd, (char *)data + moved, size - moved, MSG_NOSIGNAL | MSG_DONTWAIT)
                        : recv(comm->fd, (char *)data + moved, size - moved, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (n <= 0) return -1;
    moved += (size_t)n;
  }
  return 1;
}

static int pair_join(fake_comm *comm) {
  if (comm->rank == 0) {
    int listening = -1;
    pthread_mutex_lock(&pair_lock);
    for (int i = 0; i < PAIR_MAX; i++)
      if (pair_roots[i].nonce == comm->root.nonce) listening = pair_roots[i].fd, pair_roots[i].nonce = 0;
    pthread_mutex_unlock(&pair_lock);
    if (listening < 0) return PAIR_ARGUMENT;
    struct pollfd ready = {listening, POLLIN, 0};
    while (!comm->is_aborted && poll(&ready, 1, 5) <= 0) continue;
    comm->fd = comm->is_aborted ? -1 : accept(listening, NULL, NULL);
    close(listening);
  } else {
    struct sockaddr_in at = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)comm->root.port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    comm->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(comm->fd, (struct sockaddr *)&at, sizeof at)) return PAIR_SYSTEM;
  }
  if (comm->fd < 0) return PAIR_SYSTEM;
  struct { uint64_t nonce; int64_t device; } mine = {comm->root.nonce, comm->device}, theirs;
  if (pair_move(comm, &mine, sizeof mine, 1) != 1 || pair_move(comm, &theirs, sizeof theirs, 0) != 1)
    return PAIR_REMOTE;
  if (theirs.nonce != comm->root.nonce) return PAIR_ARGUMENT;
  if (theirs.device == mine.device) return PAIR_USAGE; /* two ranks on one device */
  usleep((useconds_t)fake_init_ms * 1000);
  return PAIR_OK;
}

static int pair_carry_out(fake_comm *comm, fake_op *op) {
  fake_header mine = {op->count, op->dtype}, theirs;
  if (op->is_send) {
    int moved = pair_move(comm, &mine, sizeof mine, 1);
    return moved == 1 ? pair_move(comm, op->data, op->count, 1) : moved;
  }
  int moved = pair_move(comm, &theirs, sizeof theirs, 0);
  if (moved == 1 && (theirs.count != mine.count || theirs.dtype != mine.dtype)) return -2;
  return moved == 1 ? pair_move(comm, op->data, op->count, 0) : moved;
}

static double pair_clock(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* What was queued goes to the stream a little later, whatever that still does. */
static void pair_launch(fake_comm *comm) {
  if (comm->state != PAIR_PENDING || comm->launch_at == 0 || pair_clock() < comm->launch_at) return;
  for (fake_op *op = comm->first; op; op = op->next) op->stream->queued += !op->is_launched, op->is_launched = 1;
  comm->state = PAIR_OK;
  comm->launch_at = 0;
}

/* The device and the library's own thread. Ends when the pair is aborted. */
static void *pair_work(void *argument) {
  fake_comm *comm = argument;
  int state = pair_join(comm);
  pthread_mutex_lock(&pair_lock);
  comm->state = state;
  for (;;) {
    while (!comm->is_aborted && (comm->first == NULL || (comm->state != PAIR_OK && comm->state != PAIR_PENDING)))
      pthread_cond_wait(&pair_changed, &pair_lock);
    if (comm->is_aborted) break;
    pair_launch(comm);
    fake_op *op = comm->first;
    if (!op->is_launched) {
      pthread_mutex_unlock(&pair_lock);
      usleep(1000);
      pthread_mutex_lock(&pair_lock);
      continue;
    }
    pthread_mutex_unlock(&pair_lock);
    int moved = pair_carry_out(comm, op);
    pthread_mutex_lock(&pair_lock);
    if (moved == 1) {
      op->stream->done++;
      comm->first = op->next;
      free(op);
    } else if (moved < 0) {
      comm->state = moved == -2 ? PAIR_USAGE : PAIR_REMOTE;
    }
  }
  for (fake_op *next, *op = comm->first; op; op = next) { /* the kernels end, and wrote what they wrote */
    next = op->next;
    op->stream->done += op->is_launched;
    free(op);
  }
  comm->first = NULL;
  if (comm->fd >= 0) close(comm->fd);
  pthread_mutex_unlock(&pair_lock);
  return NULL;
}

static int pair_begin(fake_comm **found, const fake_root *root, int rank, size_t buffer) {
  if (root->magic != PAIR_MAGIC || (rank != 0 && rank != 1)) return PAIR_ARGUMENT;
  if (buffer > fake_total - fake_used) return PAIR_OOM;
  fake_comm *comm = calloc(1, sizeof *comm);
  *comm = (fake_comm){.magic = PAIR_MAGIC, .fd = -1, .rank = rank, .device = fake_device, .state = PAIR_PENDING,
                      .buffer = buffer, .root = *root};
  fake_used += buffer;
  if (pthread_create(&comm->thread, NULL, pair_work, comm)) abort();
  *found = comm;
  return PAIR_OK;
}

/* Of an aborted pair the real ones read freed memory; here it stays, and the call is refused and counted. */
static int pair_state(fake_comm *comm) {
  if (comm == NULL || comm->magic != PAIR_MAGIC) {
    __atomic_add_fetch(&fake_misuses, 1, __ATOMIC_SEQ_CST);
    return PAIR_ARGUMENT;
  }
  pthread_mutex_lock(&pair_lock);
  pair_launch(comm);
  int state = comm->state;
  pthread_mutex_unlock(&pair_lock);
  return state;
}

static fake_op *pair_op(void *data, uint64_t count, uint32_t dtype, void *stream, int is_send) {
  fake_op *op = calloc(1, sizeof *op);
  pthread_mutex_lock(&pair_lock);
  *op = (fake_op){data, count, dtype, is_send, 0, pair_stream(stream), NULL};
  pthread_mutex_unlock(&pair_lock);
  return op;
}

/* A list of operations. `is_launched`: they are on their stream when this returns; else soon after. */
static void pair_queue(fake_comm *comm, fake_op *ops, int is_launched) {
  pthread_mutex_lock(&pair_lock);
  for (fake_op *op = ops; op && is_launched; op = op->next) op->stream->queued++, op->is_launched = 1;
  if (!is_launched) comm->state = PAIR_PENDING, comm->launch_at = pair_clock() + 0.002;
  fake_op **end = &comm->first;
  while (*end) end = &(*end)->next;
  *end = ops;
  pthread_cond_broadcast(&pair_changed);
  pthread_mutex_unlock(&pair_lock);
}

/* Whether it may be used: while it is in progress it may not. */
static int pair_require(fake_comm *comm) {
  int state = pair_state(comm);
  if (state == PAIR_PENDING) __atomic_add_fetch(&fake_misuses, 1, __ATOMIC_SEQ_CST);
  return state == PAIR_PENDING ? PAIR_ARGUMENT : state;
}

static int pair_abort(fake_comm *comm) {
  if (comm == NULL || comm->magic != PAIR_MAGIC) return pair_state(NULL);
  usleep((useconds_t)fake_abort_ms * 1000);
  pthread_mutex_lock(&pair_lock);
  comm->magic = 0;
  comm->is_aborted = 1;
  pthread_cond_broadcast(&pair_changed);
  pthread_mutex_unlock(&pair_lock);
  pthread_join(comm->thread, NULL);
  fake_used -= comm->buffer;
  return PAIR_OK;
}
#endif
