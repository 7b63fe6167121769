/* libcudart and libamdhip64 have the same calls under two prefixes: define API(name), and VISIBLE, the variable that says
 * which devices there are, before including this. */
#include "fake_collectives.h"

typedef struct {
  char reserved[64];
} ipc_handle;

static const int codes[] = {0, 1 /* invalid value */, 2 /* out of memory */, 400 /* invalid resource handle */,
                            999 /* unknown: the real ones leave it undefined */, 101 /* invalid device */,
                            201 /* invalid context */, 3 /* initialization error */, 712 /* already registered */,
                            713 /* not registered */};

static int done(const char *name, int status) {
  int injected = fake_injected(name);
  int code = injected ? injected : codes[status];
  if (code) fake_last_error = code;
  return code;
}
#define STRING(x) #x
#define NAME(x) STRING(x)
#define DONE(name, status) return done(NAME(API(name)), status)
/* A call that fails has no effect. */
#define GUARD(name)                                                            \
  do {                                                                         \
    int started = fake_start(VISIBLE);                                         \
    if (started != FAKE_OK || (fake_fail_times > 0 && strcmp(NAME(API(name)), fake_fail_name) == 0)) \
      DONE(name, started);                                                     \
  } while (0)

int API(GetDeviceCount)(int *count) {
  GUARD(GetDeviceCount);
  *count = fake_num_visible;
  DONE(GetDeviceCount, FAKE_OK);
}
int API(SetDevice)(int index) {
  GUARD(SetDevice);
  if (index < 0 || index >= fake_num_visible) DONE(SetDevice, FAKE_NO_DEVICE);
  fake_device = index;
  DONE(SetDevice, FAKE_OK);
}
int API(DeviceGetPCIBusId)(char *text, int length, int index) {
  GUARD(DeviceGetPCIBusId);
  if (index < 0 || index >= fake_num_visible || length < 13) DONE(DeviceGetPCIBusId, FAKE_NO_DEVICE);
  snprintf(text, (size_t)length, "0000:%02x:00.0", fake_visible[index] + 5);
  DONE(DeviceGetPCIBusId, FAKE_OK);
}
int API(Malloc)(void **pointer, size_t size) { GUARD(Malloc); DONE(Malloc, fake_malloc(pointer, size)); }
int API(Free)(void *pointer) { GUARD(Free); DONE(Free, fake_release(pointer, 0)); }
int API(MemGetInfo)(size_t *available, size_t *total) {
  *available = fake_total - fake_used;
  *total = fake_total;
  DONE(MemGetInfo, FAKE_OK);
}
int API(IpcGetMemHandle)(ipc_handle *handle, void *pointer) {
  fake_handle inner;
  GUARD(IpcGetMemHandle);
  int status = MAY_EXPORT ? fake_export(pointer, &inner) : FAKE_INVALID;
  memset(handle, 0, sizeof *handle);
  if (status == FAKE_OK) memcpy(handle->reserved, &inner, sizeof inner);
  DONE(IpcGetMemHandle, status);
}
int API(IpcOpenMemHandle)(void **pointer, ipc_handle handle, unsigned flags) {
  fake_handle inner;
  GUARD(IpcOpenMemHandle);
  memcpy(&inner, handle.reserved, sizeof inner);
  fake_open_flags = flags;
  if (!MAY_OPEN(inner)) DONE(IpcOpenMemHandle, FAKE_NO_DEVICE);
  DONE(IpcOpenMemHandle, fake_open(&inner, pointer));
}
int API(IpcCloseMemHandle)(void *pointer) { GUARD(IpcCloseMemHandle); DONE(IpcCloseMemHandle, fake_release(pointer, 1)); }
int API(MemcpyAsync)(void *dst, const void *src, size_t size, int kind, void *stream) {
  GUARD(MemcpyAsync);
  (void)stream;
  DONE(MemcpyAsync, fake_copy(dst, src, size, kind));
}
int API(HostRegister)(void *pointer, size_t size, unsigned flags) {
  GUARD(HostRegister);
  DONE(HostRegister, flags == 0 ? fake_register(pointer, size) : FAKE_INVALID);
}
int API(HostUnregister)(void *pointer) { GUARD(HostUnregister); DONE(HostUnregister, fake_unregister(pointer)); }
int API(StreamCreateWithFlags)(void **stream, unsigned flags) {
  *stream = (void *)(intptr_t)(0x1000 + ++fake_streams_created);
  DONE(StreamCreateWithFlags, flags == 1 ? FAKE_OK : FAKE_INVALID);
}
int API(StreamSynchronize)(void *stream) { (void)stream; fake_stream_syncs++; DONE(StreamSynchronize, FAKE_OK); }
int API(EventCreateWithFlags)(void **event, unsigned flags) {
  *event = calloc(1, sizeof(fake_event));
  fake_events++;
  DONE(EventCreateWithFlags, flags == 2 ? FAKE_OK : FAKE_INVALID);
}
int API(EventRecord)(void *event, void *stream) { pair_record(event, stream); DONE(EventRecord, FAKE_OK); }
int API(EventQuery)(void *event) {
  if (pair_is_done(event)) return 0;
  return (int)(fake_last_error = 600);
}
int API(EventDestroy)(void *event) { free(event); fake_events--; DONE(EventDestroy, FAKE_OK); }
int API(DeviceSynchronize)(void) { fake_device_syncs++; DONE(DeviceSynchronize, FAKE_OK); }
int API(GetLastError)(void) { int code = (int)fake_last_error; fake_last_error = 0; return code; }
const char *API(GetErrorString)(int code) {
  switch (code) {
    case 1: return "invalid argument";
    case 2: return "out of memory";
    case 3: return "initialization error";
    case 101: return "invalid device ordinal";
    case 201: return "invalid device context";
    case 400: return "invalid resource handle";
    case 712: return "part or all of the requested memory range is already mapped";
    case 713: return "pointer does not correspond to a registered memory region";
    case 999: return "another process has it mapped";
    default: return "unspecified launch failure";
  }
}

/* --- libnccl and librccl: the same calls -------------------------------------------------------------------------- */

typedef struct { char internal[128]; } nccl_id;
typedef struct {
  size_t size;
  unsigned magic, version;
  int blocking, cga_cluster_size, min_ctas, max_ctas;
  const char *net_name;
} nccl_config;

static const int nccl_codes[] = {0, 2, 4, 5, 6, 7, 1};
static _Thread_local int nccl_depth;
static _Thread_local fake_comm *nccl_comm;
static _Thread_local fake_op *nccl_ops;

int ncclGetUniqueId(nccl_id *id) {
  fake_root root;
  int status = pair_root(&root);
  memset(id, 0, sizeof *id);
  memcpy(id->internal, &root, sizeof root);
  return nccl_codes[status];
}
int ncclCommInitRankConfig(fake_comm **comm, int size, nccl_id id, int rank, nccl_config *config) {
  fake_root root;
  memcpy(&root, id.internal, sizeof root);
  if (size != 2 || config->size != sizeof *config || config->magic != 0xcafebeef || config->version != 21700 ||
      config->blocking != 0 || config->cga_cluster_size != INT32_MIN || config->max_ctas < 1)
    return 4;
  int status = pair_begin(comm, &root, rank, 0);
  return status == PAIR_OK ? 7 : nccl_codes[status];
}
int ncclCommGetAsyncError(fake_comm *comm, int *state) {
  int found = pair_state(comm);
  *state = nccl_codes[found];
  return comm->magic == PAIR_MAGIC ? 0 : 4;
}
int ncclGroupStart(void) { nccl_depth++; return 0; }
int ncclGroupEnd(void) {
  if (--nccl_depth < 0) return 5;
  if (nccl_ops == NULL) return 0;
  pair_queue(nccl_comm, nccl_ops, 0);
  nccl_ops = NULL;
  return 7;
}
static int nccl_move(void *data, size_t count, int dtype, int peer, fake_comm *comm, void *stream, int is_send) {
  int status = pair_require(comm);
  if (status != PAIR_OK) return nccl_codes[status];
  if (nccl_depth != 1 || dtype < 0 || dtype > 9 || peer != 1 - comm->rank) return 4;
  fake_op **end = &nccl_ops;
  while (*end) end = &(*end)->next;
  *end = pair_op(data, count, (uint32_t)dtype, stream, is_send);
  nccl_comm = comm;
  return 0;
}
int ncclSend(void *data, size_t count, int dtype, int peer, fake_comm *comm, void *stream) {
  return nccl_move(data, count, dtype, peer, comm, stream, 1);
}
int ncclRecv(void *data, size_t count, int dtype, int peer, fake_comm *comm, void *stream) {
  return nccl_move(data, count, dtype, peer, comm, stream, 0);
}
int ncclCommAbort(fake_comm *comm) { return nccl_codes[pair_abort(comm)]; }
const char *ncclGetErrorString(int code) {
  switch (code) {
    case 1: return "unhandled cuda error";
    case 2: return "unhandled system error";
    case 4: return "invalid argument";
    case 5: return "invalid usage";
    case 6: return "remote process exited or there was a network error";
    default: return "unknown result code";
  }
}
