// SPDX-License-Identifier: Apache-2.0
// A program of the kit on Paho C, asynchronous; without arguments it prints the version of the library.
#include <MQTTAsync.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { EXPIRY_S = 300, LINE_BYTES_MAX = 1024 };

static MQTTAsync client;
static int version;

static void failed(const char *what, int code) {
    fprintf(stderr, "%s: %d\n", what, code);
    exit(1);
}

static void on_failure(void *context, MQTTAsync_failureData *data) { failed(context, data ? data->code : 0); }
static void on_failure5(void *context, MQTTAsync_failureData5 *data) { failed(context, data ? data->code : 0); }

static void connected(void *context, MQTTAsync_successData *data) {
    (void)context;
    printf("connected %d\n", data->alt.connect.sessionPresent);
}
static void connected5(void *context, MQTTAsync_successData5 *data) {
    (void)context;
    printf("connected %d\n", data->alt.connect.sessionPresent);
}
static void subscribed(void *context, MQTTAsync_successData *data) {
    (void)context;
    printf("subscribed %d\n", data->alt.qos);
}
static void subscribed5(void *context, MQTTAsync_successData5 *data) {
    (void)context;
    printf("subscribed %d\n", data->reasonCode);
}
static void published(void *context, MQTTAsync_successData *data) {
    (void)context, (void)data;
    puts("published");
}
static void published5(void *context, MQTTAsync_successData5 *data) {
    (void)context, (void)data;
    puts("published");
}
static void disconnected(void *context, MQTTAsync_successData *data) {
    (void)context, (void)data;
    exit(0);
}
static void disconnected5(void *context, MQTTAsync_successData5 *data) {
    (void)context, (void)data;
    exit(0);
}

/* The library connects again by itself, and does not say then whether the session was present. */
static void again(void *context, char *cause) {
    (void)context;
    if (cause && !strcmp(cause, "automatic reconnect"))
        puts("connected ?");
}

static int arrived(void *context, char *topic, int size, MQTTAsync_message *message) {
    (void)context;
    if (size)
        printf("message %.*s", size, topic);
    else
        printf("message %s", topic);
    printf(" %d %.*s\n", message->qos, message->payloadlen, (char *)message->payload);
    MQTTAsync_freeMessage(&message);
    MQTTAsync_free(topic);
    return 1;
}

static MQTTAsync_responseOptions response(void (*success)(void *, MQTTAsync_successData *),
                                          void (*success5)(void *, MQTTAsync_successData5 *), char *what) {
    MQTTAsync_responseOptions options = MQTTAsync_responseOptions_initializer;
    options.context = what;
    if (version == 5) {
        options.onSuccess5 = success5;
        options.onFailure5 = on_failure5;
    } else {
        options.onSuccess = success;
        options.onFailure = on_failure;
    }
    return options;
}

static void start(const char *address, const char *client_id, int clean, const char *will_topic) {
    char uri[256];
    snprintf(uri, sizeof uri, "tcp://%s", address);
    MQTTAsync_createOptions create = MQTTAsync_createOptions_initializer;
    create.MQTTVersion = version == 5 ? MQTTVERSION_5 : MQTTVERSION_3_1_1;
    int code = MQTTAsync_createWithOptions(&client, uri, client_id, MQTTCLIENT_PERSISTENCE_NONE, NULL, &create);
    if (code)
        failed("create", code);
    MQTTAsync_setCallbacks(client, NULL, NULL, arrived, NULL);
    MQTTAsync_setConnected(client, NULL, again);
    MQTTAsync_connectOptions options = MQTTAsync_connectOptions_initializer;
    MQTTAsync_connectOptions options5 = MQTTAsync_connectOptions_initializer5;
    MQTTAsync_willOptions will = MQTTAsync_willOptions_initializer;
    MQTTProperties properties = MQTTProperties_initializer;
    if (version == 5) {
        MQTTProperty expiry = {.identifier = MQTTPROPERTY_CODE_SESSION_EXPIRY_INTERVAL};
        expiry.value.integer4 = clean ? 0 : EXPIRY_S;
        MQTTProperties_add(&properties, &expiry);
        options = options5;
        options.cleanstart = clean;
        options.connectProperties = &properties;
        options.onSuccess5 = connected5;
        options.onFailure5 = on_failure5;
    } else {
        options.cleansession = clean;
        options.onSuccess = connected;
        options.onFailure = on_failure;
    }
    options.context = "connect";
    options.keepAliveInterval = 30;
    options.automaticReconnect = 1;
    options.minRetryInterval = 1;
    options.maxRetryInterval = 1;
    if (will_topic) {
        will.topicName = will_topic;
        will.message = "gone";
        will.qos = 1;
        options.will = &will;
    }
    if ((code = MQTTAsync_connect(client, &options)))
        failed("connect", code);
}

int main(int count, char **words) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (count == 1) {
        for (MQTTAsync_nameValue *one = MQTTAsync_getVersionInfo(); one->name; one++)
            if (!strcmp(one->name, "Version"))
                puts(one->value);
        return 0;
    }
    version = atoi(words[2]);
    start(words[1], words[3], atoi(words[4]), count > 5 ? words[5] : NULL);
    char line[LINE_BYTES_MAX], command[32], topic[256], payload[256];
    int qos;
    while (fgets(line, sizeof line, stdin)) {
        int found = sscanf(line, "%31s %255s %d %255s", command, topic, &qos, payload), code = 0;
        if (found == 3) {
            MQTTAsync_responseOptions options = response(subscribed, subscribed5, "subscribe");
            code = MQTTAsync_subscribe(client, topic, qos, &options);
        } else if (found == 4) {
            MQTTAsync_responseOptions options = response(published, published5, "publish");
            code = MQTTAsync_send(client, topic, (int)strlen(payload), payload, qos, 0, &options);
        } else {
            break;
        }
        if (code)
            failed(command, code);
    }
    MQTTAsync_disconnectOptions end = MQTTAsync_disconnectOptions_initializer;
    if (version == 5)
        end.onSuccess5 = disconnected5;
    else
        end.onSuccess = disconnected;
    MQTTAsync_disconnect(client, &end);
    for (;;)
        pause();
}
