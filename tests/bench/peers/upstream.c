/* An OpenAI-compatible upstream that costs next to nothing: `upstream ANSWER_FILE TOKENS GAP_US`.
 *
 * One thread, epoll, kept connections on a free port of 127.0.0.1, which it prints. Every GET returns a list of one
 * model, GET /requests the number of completions so far. A POST returns the file, or, if its body asks for a stream,
 * TOKENS server-sent events, the first at once and then one every GAP_US microseconds. It trusts its clients: proxies
 * under test, which send a Content-Length or one body of chunks.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { CONNECTIONS = 4096, INPUT = 1 << 18, OUTPUT = 1 << 16, EVENTS = 256 };

/* `due`: when the next token is to be sent, in nanoseconds; 0: this connection waits for a request. */
struct connection { size_t filled; long due; int sent; char input[INPUT]; };

static struct connection *connections[CONNECTIONS];
static char answer[OUTPUT], output[OUTPUT];
static size_t answer_bytes;
static long gap_ns, completions;
static int tokens, streaming, highest;

static const char MODELS[] = "{\"object\":\"list\",\"data\":[{\"id\":\"mock\",\"object\":\"model\",\"created\":1,\"owned_by\":\"bench\"}]}";
static const char STREAM[] = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
static const char CHOICE[] = "{\"id\":\"chatcmpl-mock\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"mock\",\"choices\":[{\"index\":0,\"delta\":";

static long now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}

static void end(int fd) {
    if (connections[fd]->due) streaming--;
    free(connections[fd]);
    connections[fd] = NULL;
    close(fd);
}

static void write_all(int fd, const char *bytes, size_t left) {
    while (left) {
        ssize_t written = send(fd, bytes, left, MSG_NOSIGNAL);
        if (written < 0 && errno == EAGAIN) {
            struct pollfd writable = {fd, POLLOUT, 0};
            poll(&writable, 1, 1000);
        } else if (written < 0) {
            return; /* the reader has gone: its connection's end is the next event */
        } else {
            bytes += written;
            left -= (size_t)written;
        }
    }
}

static void reply(int fd, const char *body, size_t bytes) {
    int head = sprintf(output, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n", bytes);
    memcpy(output + head, body, bytes);
    write_all(fd, output, (size_t)head + bytes);
}

static int event(char *to, const char *delta, const char *reason) {
    size_t bytes = sizeof CHOICE - 1 + strlen(delta) + strlen(reason) + strlen("data: ,\"finish_reason\":}]}\n\n");
    return sprintf(to, "%zx\r\ndata: %s%s,\"finish_reason\":%s}]}\n\n\r\n", bytes, CHOICE, delta, reason);
}

/* Sends what is due of a stream: the beginning with the first token, a token, or the last one with the end. */
static void advance(int fd) {
    struct connection *stream = connections[fd];
    int bytes = 0;
    if (stream->sent == 0) {
        bytes = sprintf(output, "%s", STREAM);
        bytes += event(output + bytes, "{\"role\":\"assistant\",\"content\":\"\"}", "null");
    }
    bytes += event(output + bytes, "{\"content\":\" tokn\"}", "null");
    if (++stream->sent == tokens) {
        bytes += event(output + bytes, "{}", "\"stop\"");
        bytes += sprintf(output + bytes, "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n");
        stream->due = 0;
        streaming--;
    } else {
        stream->due = now_ns() + gap_ns; /* as a model does that is late: no token is sent faster afterwards */
    }
    write_all(fd, output, (size_t)bytes);
}

/* Returns the bytes of the first request once it is complete, or 0. */
static size_t request_bytes(const char *input, char **body) {
    char *blank = strstr(input, "\r\n\r\n");
    if (blank == NULL) return 0;
    *body = blank + 4;
    *blank = 0;
    char *length = strcasestr(input, "\r\ncontent-length:");
    int chunked = strcasestr(input, "\r\ntransfer-encoding: chunked") != NULL;
    long bytes = length ? atol(length + 17) : 0;
    *blank = '\r';
    if (chunked) {
        char *last = strstr(*body, "0\r\n\r\n");
        return last ? (size_t)(last + 5 - input) : 0;
    }
    return (size_t)(*body - input) + (size_t)bytes;
}

/* Answers the requests that have arrived, until one begins a stream. */
static void serve(int fd) {
    struct connection *client = connections[fd];
    char *body;
    size_t bytes;
    while (!client->due && (bytes = request_bytes(client->input, &body)) && bytes <= client->filled) {
        if (client->input[0] != 'P') {
            char count[32];
            int counts = !strncmp(client->input, "GET /requests ", 14);
            if (counts) sprintf(count, "%ld", completions);
            reply(fd, counts ? count : MODELS, strlen(counts ? count : MODELS));
        } else if (completions++, strstr(body, "\"stream\":true") || strstr(body, "\"stream\": true")) {
            client->due = now_ns();
            client->sent = 0;
            streaming++;
            advance(fd);
        } else {
            reply(fd, answer, answer_bytes);
        }
        client->filled -= bytes;
        memmove(client->input, client->input + bytes, client->filled + 1);
    }
}

static void receive(int fd) {
    struct connection *client = connections[fd];
    ssize_t bytes = recv(fd, client->input + client->filled, INPUT - 1 - client->filled, 0);
    if (bytes < 0 && errno == EAGAIN) return;
    if (bytes <= 0) {
        end(fd);
        return;
    }
    client->filled += (size_t)bytes;
    client->input[client->filled] = 0;
    serve(fd);
}

static void welcome(int listener, int poller) {
    int fd, one = 1;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
        if (fd >= CONNECTIONS || !(connections[fd] = calloc(1, sizeof(struct connection)))) {
            close(fd);
            continue;
        }
        if (fd > highest) highest = fd;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
    }
}

/* Sends the tokens that are due. Returns the nanoseconds until the next one. */
static long send_due(void) {
    long now = now_ns(), next = now + 1000000000L;
    for (int fd = 0; fd <= highest && streaming; fd++) {
        if (!connections[fd] || !connections[fd]->due) continue;
        if (connections[fd]->due <= now) {
            advance(fd);
            serve(fd);
        }
        if (connections[fd]->due && connections[fd]->due < next) next = connections[fd]->due;
    }
    long left = next - now_ns();
    return left > 0 ? left : 0;
}

int main(int argc, char **argv) {
    FILE *file = argc == 4 ? fopen(argv[1], "rb") : NULL;
    if (file == NULL) {
        fprintf(stderr, "usage: %s ANSWER_FILE TOKENS GAP_US\n", argv[0]);
        return 2;
    }
    answer_bytes = fread(answer, 1, OUTPUT - 512, file);
    tokens = atoi(argv[2]);
    gap_ns = atol(argv[3]) * 1000;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), poller = epoll_create1(0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    if (bind(listener, (struct sockaddr *)&address, size) || listen(listener, 1024)) {
        perror(argv[0]);
        return 1;
    }
    getsockname(listener, (struct sockaddr *)&address, &size);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = listener}, events[EVENTS];
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &event);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    for (;;) {
        long wait = streaming ? send_due() : 0;
        struct timespec until = {wait / 1000000000L, wait % 1000000000L};
        int ready = epoll_pwait2(poller, events, EVENTS, streaming ? &until : NULL, NULL);
        for (int number = 0; number < ready; number++) {
            int fd = events[number].data.fd;
            if (fd == listener) welcome(listener, poller);
            else if (connections[fd]) receive(fd);
        }
    }
}
